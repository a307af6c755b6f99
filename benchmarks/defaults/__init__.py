"""Whether the callbacks train well with default arguments on standard problems."""
