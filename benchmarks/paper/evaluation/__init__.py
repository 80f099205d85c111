"""What the paper measures of quality: its benchmarks, judged, in turn, and beside DroidSpeak."""
