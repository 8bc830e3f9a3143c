"""What a plan would do with a tree, as data and as a table."""
