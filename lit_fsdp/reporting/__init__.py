"""What callbacks show: sections, plots, curves and the files of a report."""
