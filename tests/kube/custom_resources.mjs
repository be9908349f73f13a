// Reads a JSON list of manifests, and writes for each the list of what is wrong by the models of @kubernetes-models:
// their validators know types, required fields, enumerations and patterns; TypeScript knows which fields there are.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const root = process.argv[2];
const require = createRequire(join(root, "package.json"));
const ts = require("typescript");
const packages = {
  "cert-manager.io": "@kubernetes-models/cert-manager",
  "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
  "keda.sh": "@kubernetes-models/keda",
  "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
};

const manifests = JSON.parse(readFileSync(0, "utf8"));
const problems = manifests.map(() => []);
const lines = [];
for (const [index, manifest] of manifests.entries()) {
  const group = manifest.apiVersion.split("/")[0];
  const path = `${packages[group]}/${manifest.apiVersion}/${manifest.kind}`;
  try {
    const model = await import(pathToFileURL(join(root, "node_modules", path + ".js")));
    new model[manifest.kind](manifest).validate();
  } catch (error) {
    problems[index].push(String(error.message ?? error));
  }
  // One line each, so that a line tells which manifest it is.
  lines.push(`export const m${index}: import("${path}").I${manifest.kind} = ${JSON.stringify(manifest)};`);
}

const file = join(root, "manifests.ts");
const options = { noEmit: true, strict: true, skipLibCheck: true, module: ts.ModuleKind.ESNext, target: ts.ScriptTarget.ES2022,
  moduleResolution: ts.ModuleResolutionKind.Bundler, types: [] };
const host = ts.createCompilerHost(options);
const read = host.getSourceFile;
const source = ts.createSourceFile(file, lines.join("\n"), options.target);
host.getSourceFile = (name, ...rest) => (name === file ? source : read(name, ...rest));
const program = ts.createProgram([file], options, host);
for (const found of ts.getPreEmitDiagnostics(program)) {
  if (found.file !== source) throw new Error(ts.flattenDiagnosticMessageText(found.messageText, " "));
  const index = source.getLineAndCharacterOfPosition(found.start).line;
  problems[index].push(ts.flattenDiagnosticMessageText(found.messageText, " "));
}
console.log(JSON.stringify(problems));
