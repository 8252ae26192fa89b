"""What a frontend does when its core dies: what to send again, when to start another, whom to blame."""
