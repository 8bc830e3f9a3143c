"""PURE. Which mapping, mesh and names a tree has, and the shardings they ask for."""
