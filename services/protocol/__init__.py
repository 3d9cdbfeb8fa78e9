"""What the services share about requests: their types, how they are read and written, logs and cursors, hello."""
