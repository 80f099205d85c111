"""What a translator costs in quality and what it saves in time."""
