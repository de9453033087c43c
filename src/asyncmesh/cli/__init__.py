"""The command line: reads settings, calls the rest, prints one line for a mistake."""
