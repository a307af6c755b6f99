"""Whether the callbacks train well without arguments, on other people's problems."""
