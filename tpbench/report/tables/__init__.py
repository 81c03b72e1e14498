"""Tables as plain data, and their text, Markdown and CSV."""
