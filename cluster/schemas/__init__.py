"""What is said over HTTP and over the channel: requests, answers, frames, command ids."""
