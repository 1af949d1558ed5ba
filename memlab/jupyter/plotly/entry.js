// The part of plotly that live figures use: lines, points and bars.
const Plotly = require("plotly.js/lib/core");
Plotly.register([require("plotly.js/lib/bar")]);
module.exports = Plotly;
