"""Agents that speak OpenAI's protocol: a gateway before the engines makes their work a rollout."""
