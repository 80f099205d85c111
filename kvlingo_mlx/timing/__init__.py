"""What a switch costs on this machine, beside what it could cost at best."""
