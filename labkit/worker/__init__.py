"""What happens on a rank."""
