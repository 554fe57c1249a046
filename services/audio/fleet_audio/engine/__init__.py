"""Engines of audio: Whisper through faster-whisper, Hibari, or scripted stand-ins."""
