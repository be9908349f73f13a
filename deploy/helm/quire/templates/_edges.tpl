{{/* The calls that services may make. docs/kubernetes.md draws these edges, and a test compares the two. */}}

{{/* A JSON list below `edges`: from, to and TCP ports. Names without a component of the chart are outside of it. */}}
{{- define "quire.edges" -}}
{{- $edges := list
  (dict "from" "clients" "to" "router" "ports" (list 8000 50050))
  (dict "from" "router" "to" "tokenizer" "ports" (list 50051))
  (dict "from" "router" "to" "engine" "ports" (list 50052)) -}}
{{- range list "router" "tokenizer" "engine" -}}
{{- $edges = append $edges (dict "from" . "to" "dns" "ports" (list 53)) -}}
{{- end -}}
{{- if .Values.kvstore.enabled -}}
{{- $edges = append $edges (dict "from" "engine" "to" "kvstore" "ports" (list 50054 50064)) -}}
{{- $edges = append $edges (dict "from" "router" "to" "kvstore" "ports" (list 50054)) -}}
{{- if or .Values.kvstore.redis.secretName (eq .Values.discovery "redis") .Values.monitoring.otlpEndpoint -}}
{{- $edges = append $edges (dict "from" "kvstore" "to" "dns" "ports" (list 53)) -}}
{{- end -}}
{{- if or .Values.kvstore.redis.secretName (eq .Values.discovery "redis") -}}
{{- $edges = append $edges (dict "from" "kvstore" "to" "redis" "ports" (list (int .Values.redis.port))) -}}
{{- end -}}
{{- end -}}
{{- if include "quire.peers" . -}}
{{- $edges = append $edges (dict "from" "engine" "to" "engine" "ports" (list 50055 50056)) -}}
{{- end -}}
{{- if include "quire.redis" . -}}
{{- $edges = append $edges (dict "from" "router" "to" "redis" "ports" (list (int .Values.redis.port))) -}}
{{- if eq .Values.discovery "redis" -}}
{{- range list "tokenizer" "engine" -}}
{{- $edges = append $edges (dict "from" . "to" "redis" "ports" (list (int $.Values.redis.port))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.model.hub.enabled -}}
{{- range list "tokenizer" "engine" -}}
{{- $edges = append $edges (dict "from" . "to" "hub" "ports" (list 443)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.networkPolicies.monitoring -}}
{{- range list "router" "tokenizer" -}}
{{- $edges = append $edges (dict "from" "monitoring" "to" . "ports" (list 9090)) -}}
{{- end -}}
{{- $edges = append $edges (dict "from" "monitoring" "to" "engine" "ports" (list 9090 9091)) -}}
{{- if .Values.kvstore.enabled -}}
{{- $edges = append $edges (dict "from" "monitoring" "to" "kvstore" "ports" (list 9090)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.monitoring.otlpEndpoint -}}
{{- range ternary (list "router" "tokenizer" "engine" "kvstore") (list "router" "tokenizer" "engine") .Values.kvstore.enabled -}}
{{- $edges = append $edges (dict "from" . "to" "collector" "ports" (list (int $.Values.monitoring.otlpPort))) -}}
{{- end -}}
{{- end -}}
{{- if .Values.networkPolicies.mesh -}}
{{- range (include "quire.components" . | fromJson).components -}}
{{- $edges = append $edges (dict "from" . "to" "mesh" "ports" (list 15012)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.experimental.ranks -}}
{{- range list (list "engine" "engine-rank") (list "engine-rank" "engine") (list "engine-rank" "engine-rank") -}}
{{- $edges = append $edges (dict "from" (first .) "to" (last .) "ports" (list 50057)) -}}
{{- end -}}
{{- $edges = append $edges (dict "from" "engine-rank" "to" "dns" "ports" (list 53)) -}}
{{- end -}}
{{ dict "edges" $edges | toJson }}
{{- end -}}

{{/* The components whose pods have a policy, as a JSON list below `components`. */}}
{{- define "quire.components" -}}
{{- $components := list "router" "tokenizer" "engine" -}}
{{- if .Values.kvstore.enabled }}{{ $components = append $components "kvstore" }}{{ end -}}
{{- if .Values.redis.bundled }}{{ $components = append $components "redis" }}{{ end -}}
{{- if .Values.experimental.ranks }}{{ $components = append $components "engine-rank" }}{{ end -}}
{{ dict "components" $components | toJson }}
{{- end -}}

{{/* The peers of a rule, as YAML; empty: every address. Takes root and name. */}}
{{- define "quire.edgePeers" -}}
{{- $root := .root -}}
{{- $outside := dict "clients" $root.Values.networkPolicies.clients "monitoring" $root.Values.networkPolicies.monitoring "dns" $root.Values.networkPolicies.dns "hub" list "collector" $root.Values.monitoring.otlpPeers "redis" $root.Values.redis.peers "mesh" $root.Values.networkPolicies.mesh -}}
{{- if has .name (include "quire.components" $root | fromJson).components -}}
- podSelector:
    matchLabels:
      {{- include "quire.selector" (dict "root" $root "component" .name) | nindent 6 }}
{{- else -}}
{{- with get $outside .name }}{{ toYaml . }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* One rule of a policy. Takes root, edge, end (the edge's end that the rule names) and word (from or to). */}}
{{- define "quire.edgeRule" -}}
- ports:
    {{- range .edge.ports }}
    - {protocol: TCP, port: {{ int . }}}
    {{- end }}
    {{- if eq .end "dns" }}
    - {protocol: UDP, port: 53}
    {{- end }}
  {{- with include "quire.edgePeers" (dict "root" .root "name" .end) }}
  {{ $.word }}:
    {{- . | nindent 4 }}
  {{- end }}
{{- end -}}
