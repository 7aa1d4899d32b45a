"""Modules that every part of the trainer may use: errors, records, durable files, locks, machine facts."""
