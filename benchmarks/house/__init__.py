"""Metrics of the source code: sizes, constructors, inheritance, private symbols and the call path of one batch."""
