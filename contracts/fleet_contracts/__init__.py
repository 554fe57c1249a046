"""The only source of what travels between processes: msgspec structs, nothing else.

Rules: frozen, keyword-only, tagged `name.vN`; add optional fields with defaults, never rename, retype or reuse
a field; a break is a new tag, and both are consumed for one release. See ARCHITECTURE.md.
"""
