"""What callbacks show: sections with tables and plots, values put together over ranks, and the files of a report.

Import from the files: from here, each would load matplotlib and jinja2.

- ``sections``: ``Section``, ``Table``, ``Plot``; any callback with ``make_section`` has a part in the report
- ``step_callback``: ``StepCallback``; ``rank_stats``: ``AsyncRankStats``; ``metrics``: what a run has logged
- ``communication_section``, ``memory_section``, ``curves``, ``run_facts``, ``environment``: parts of the report
- ``plots``: ``write_png``, ``render_svg``; ``report_files``: ``write_report``
"""
