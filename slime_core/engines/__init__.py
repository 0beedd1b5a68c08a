"""SGLang's HTTP protocol: client, launcher, health, and the embedded engine."""
