"""The OpenAI routes: request schema, validation, chat templates, answers and their events."""
