"""The families of speech models: what each answers for task, data, generation, planning and export."""
