"""The terminal chat: what a person types, what is done about it, and how it is shown."""
