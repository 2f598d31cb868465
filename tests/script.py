"""Ends the process that imports it, as a script without a guard does."""

raise SystemExit(4)
