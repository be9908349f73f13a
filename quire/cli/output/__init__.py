"""What commands print: tables, progress, times, the flow of pages."""
