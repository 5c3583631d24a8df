// Makes the drawing library of the pages, and its licences, anew from the pinned packages.
import { readFileSync, writeFileSync } from "node:fs";
import { buildSync } from "esbuild";

const folder = new URL("../../torch_dcpx/cli/pages/", import.meta.url);
const text = (name) => readFileSync(new URL(`node_modules/${name}`, import.meta.url), "utf8").trim();
const version = (name) => JSON.parse(text(`${name}/package.json`)).version;
const licences = [
  `Apache ECharts ${version("echarts")}, under the Apache License 2.0`,
  text("echarts/NOTICE"),
  `Parts of Apache ECharts are of D3:\n\n${text("echarts/licenses/LICENSE-d3")}`,
  `ZRender ${version("zrender")}\n\n${text("zrender/LICENSE")}`,
  `tslib ${version("tslib")}\n\n${text("tslib/LICENSE.txt")}`,
].join("\n\n----\n\n").replaceAll("\r", "");
const built = buildSync({
  entryPoints: ["echarts.js"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "echarts",
  target: "es2020",
  charset: "ascii",
  legalComments: "none", // they stand at the head, whole
  define: { "process.env.NODE_ENV": '"production"' },
  write: false,
});
writeFileSync(new URL("LICENSE-echarts.txt", import.meta.url), `${licences}\n`);
writeFileSync(new URL("echarts.min.js", folder), `/*!\n${licences}\n*/\n${built.outputFiles[0].text}`);
