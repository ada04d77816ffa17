"""A report as one page that needs nothing else: pure functions from rows to text."""
