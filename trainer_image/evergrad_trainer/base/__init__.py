"""What every part of the trainer may use: errors, records, durable files, locks, and facts of the machine."""
