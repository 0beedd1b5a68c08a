"""What a person sees: terminal lines and pages."""
