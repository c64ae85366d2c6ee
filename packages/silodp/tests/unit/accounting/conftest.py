from hypothesis import settings

settings.register_profile("privacy", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("privacy")
