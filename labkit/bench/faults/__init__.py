"""What faults do to trainings, tried many times at random: `labkit bench faults`."""
