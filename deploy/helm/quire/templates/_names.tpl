{{/* Names, labels and images. */}}

{{- define "quire.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}

{{/* Labels that never change: selectors consist of these. Takes root and component. */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end -}}

{{- define "quire.podLabels" -}}
{{ include "quire.selector" . }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes root and image. */}}
{{- define "quire.image" -}}
{{- $images := .root.Values.images -}}
{{- $path := printf "%s/%s/%s" $images.registry $images.repository .image -}}
{{- with get $images.digests .image -}}
{{ printf "%s@%s" $path . }}
{{- else -}}
{{ printf "%s:%s" $path ($images.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{/* The pools, each with the values of poolDefaults that it does not set, as a JSON list below `pools`. */}}
{{- define "quire.pools" -}}
{{- $pools := list -}}
{{- $names := dict -}}
{{- range .Values.pools -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy .) -}}
{{- if hasKey $names $pool.name -}}{{- fail (printf "two pools have the name %q: rename one" $pool.name) -}}{{- end -}}
{{- $_ := set $names $pool.name true -}}
{{- if and (gt (int $pool.ranks) 1) (not $.Values.experimental.ranks) -}}
{{- fail (printf "pool %q has %d ranks, but a worker runs in one pod: set ranks to 1 and add replicas" $pool.name (int $pool.ranks)) -}}
{{- end -}}
{{- $disaggregated := and $.Values.disaggregatedSet.enabled (ne $pool.role "both") -}}
{{- if and (gt (int $pool.ranks) 1) (ne $pool.workload "LeaderWorkerSet") (not $disaggregated) -}}
{{- fail (printf "pool %q has %d ranks: set its workload to LeaderWorkerSet" $pool.name (int $pool.ranks)) -}}
{{- end -}}
{{- if and $disaggregated $pool.autoscaling.enabled -}}
{{- fail (printf "pool %q is a role of a DisaggregatedSet, which KEDA cannot scale: set disaggregatedSet.enabled or its autoscaling.enabled to false" $pool.name) -}}
{{- end -}}
{{- if and (ne $pool.role "both") (not $.Values.podNetworks) -}}
{{- fail (printf "pool %q has the role %s: set podNetworks to the networks of the pods, from which decode workers may fetch pages" $pool.name $pool.role) -}}
{{- end -}}
{{- if and $.Values.kvstore.enabled (ge (int $pool.kvstore) (int $.Values.kvstore.replicas)) -}}
{{- fail (printf "pool %q uses kvstore %d, but kvstore.replicas is %d: the first is 0" $pool.name (int $pool.kvstore) (int $.Values.kvstore.replicas)) -}}
{{- end -}}
{{- $model := mergeOverwrite (dict "path" $.Values.model.path "name" $.Values.model.name "revision" $.Values.model.revision) $pool.model -}}
{{- if not $model.path -}}{{- fail "model.path is empty: set it to a folder below /models, or to org/name of the Hugging Face hub" -}}{{- end -}}
{{- if and (hasPrefix "/" $model.path) (not $.Values.model.volume) -}}
{{- fail (printf "pool %q has the model %s: set model.volume to a volume with this folder" $pool.name $model.path) -}}
{{- end -}}
{{- if not (or (hasPrefix "/" $model.path) $.Values.model.hub.enabled) -}}
{{- fail (printf "pool %q has the model %s of the Hugging Face hub: set model.hub.enabled, or model.path to a folder" $pool.name $model.path) -}}
{{- end -}}
{{- $pools = append $pools (merge (dict "model" $model "disaggregated" $disaggregated) $pool) -}}
{{- end -}}
{{ dict "pools" $pools | toJson }}
{{- end -}}

{{/* Whether workers exchange pages: "true" or empty. */}}
{{- define "quire.peers" -}}
{{- range (include "quire.pools" . | fromJson).pools -}}{{- if ne .role "both" }}true{{ end -}}{{- end -}}
{{- end -}}

{{/* Whether there is a Redis for discovery, limits and responses: "true" or empty. */}}
{{- define "quire.redis" -}}
{{- if or .Values.redis.bundled .Values.redis.secretName -}}true
{{- else if eq .Values.discovery "redis" -}}{{- fail "discovery is redis: set redis.secretName, or redis.bundled for a trial" -}}
{{- end -}}
{{- end -}}

{{/* appProtocol of a gRPC port. */}}
{{- define "quire.grpcProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" .Values.tls.enabled }}
{{- end -}}
