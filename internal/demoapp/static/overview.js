"use strict";
berth.$("reset").addEventListener("click", () => berth.post("/api/reset", { part: "all" }, () => location.reload()));
