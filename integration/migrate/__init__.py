"""What services become when they move to cb_backend; docs/migrate.md shows what they were."""
