"""The GPU worker's speed: engines, tables, and the programs that choose kernel configurations."""
