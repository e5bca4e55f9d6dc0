"""The HTTP server and the web timeline: `mulligan serve`.

`routes` is the one table of paths. It makes the routes and `/openapi.json`. Each route names a function of `timeline`
(reading), `operations` (undo operations, forks, storage) or `live_session` (clients of a session). `access` decides
who may ask. `events` reads the journals once and sends what is new to all clients. `app` puts these together; read it
first. The page is in `static`: ES modules and custom elements over the JSON API, without a build step.
"""
