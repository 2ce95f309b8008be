"""Prompt to text: engine, sampling, streaming output."""
