"""EFFECTS. Arrays are moved to the shardings of a plan, on one process or between several."""
