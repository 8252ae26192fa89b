"""The page at `/`: a playground to chat in and a live view of the engine.

Plain HTML, CSS and JavaScript modules under `static/`, no build step, nothing from another host. The page talks to the
public API as any other client does; the only route of its own is the engine's state.
"""
