"""The shape of the source code in numbers: sizes, constructors, inheritance, private symbols and the path of one batch."""
