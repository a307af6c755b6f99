"""The first hour of a new user, from an empty environment: README, and what a newcomer does with own modules and data."""
