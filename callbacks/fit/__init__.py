"""What a variational fit does inside Lightning's: swap, closure, checks, schedules, resume and summary."""
