"""What is in a file: its header, its names, its bytes. Header and naming import no torch."""
