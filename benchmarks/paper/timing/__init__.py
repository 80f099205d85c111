"""The paper's tables of times: its numbers, other runs beside ours, a memory budget."""
