"""EFFECTS. Processes wait for each other, and are told when one of them fails."""
