"""What is measured, kept and drawn."""
