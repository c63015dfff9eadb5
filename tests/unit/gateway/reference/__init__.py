"""How models write calls and thoughts."""
