"""The output of commands: tables, progress, times, the flow of pages."""
