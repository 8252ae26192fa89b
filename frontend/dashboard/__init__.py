"""The page at `/`: a playground to chat in and a live view of the engine.

Plain HTML, CSS and JavaScript modules under `static/`, no build step, nothing from another host. The page uses the
public API like any other client; its only additional route returns the engine's state.
"""
