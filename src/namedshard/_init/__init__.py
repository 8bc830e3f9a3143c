"""`init`: create a tree with every leaf in its shards."""
