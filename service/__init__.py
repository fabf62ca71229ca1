"""The service: HTTP, text and people. Talks to the engine through ``engine.client`` only."""
