"""The trainings of the paper: rates by pair, and the sweep that finds them."""
