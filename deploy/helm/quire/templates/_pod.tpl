{{/* The parts that the pods of all services share. */}}

{{/* Metadata and first fields of a pod's spec. Takes root and component. */}}
{{- define "quire.podSpec" -}}
serviceAccountName: {{ include "quire.name" .root }}-{{ .component }}
automountServiceAccountToken: false
# Variables such as QUIRE_ROUTER_PORT, which links make for a service `quire-router`, are options to the services.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "quire.grace" .root }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "quire.selector" . | nindent 8 }}
        {{- with .pool }}
        quire-pool: {{ . }}
        {{- end }}
{{- end -}}

{{- define "quire.grace" -}}
{{- with .Values.drain }}{{ add (int .delaySeconds) (int .timeoutSeconds) (int .marginSeconds) }}{{ end -}}
{{- end -}}

{{- define "quire.podAnnotations" -}}
{{- with .Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "quire.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "quire.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: HOME, value: /tmp}
- {name: QUIRE_CACHE_DIR, value: /var/cache/quire}
{{- end -}}

{{/* Downloads of the hub. */}}
{{- define "quire.hubEnv" -}}
- {name: HF_HOME, value: /var/cache/quire/huggingface}
- {name: HF_HUB_OFFLINE, value: {{ ternary "0" "1" .Values.model.hub.enabled | quote }}}
{{- with .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end -}}

{{/* Flags that the user has set, by name. */}}
{{- define "quire.optionArgs" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) (float64 $value)) }}
- --{{ $name }}={{ int64 $value }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Flags of all services. Takes root, identity, port and metricsPort; host, if it is not every address. */}}
{{- define "quire.commonArgs" -}}
- --listen={{ .host | default "0.0.0.0" }}:{{ .port }}
- --metrics-listen=0.0.0.0:{{ .metricsPort }}
- --instance=$(POD_NAME)
- --drain-timeout-s={{ int .root.Values.drain.timeoutSeconds }}
{{- if .root.Values.tls.enabled }}
- --tls-cert=/tls/{{ .identity }}/tls.crt
- --tls-key=/tls/{{ .identity }}/tls.key
- --tls-ca=/tls/{{ .identity }}/ca.crt
{{- else }}
- --insecure
{{- end }}
{{- with .root.Values.monitoring.otlpEndpoint }}
- --otlp-traces-endpoint={{ . }}
{{- end }}
{{- if .root.Values.monitoring.otlpCaSecret }}
- --otlp-tls-ca=/secrets/otlp/ca.crt
{{- end }}
{{- end -}}

{{/* Flags by which a service that is found through Redis announces itself. Takes root and port. */}}
{{- define "quire.discoveryArgs" -}}
{{- if and (eq .root.Values.discovery "redis") (include "quire.redis" .root) }}
- --advertise=$(POD_IP):{{ .port }}
{{- if .root.Values.redis.bundled }}
- --discovery=redis://{{ include "quire.name" .root }}-redis:6379/0
{{- else }}
- --discovery-file=/secrets/redis/url
{{- end }}
{{- end }}
{{- end -}}

{{/* Probes over HTTP. Takes port, scheme and startupSeconds. */}}
{{- define "quire.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: {{ .port }}, scheme: {{ .scheme }}}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ div (int .startupSeconds) 2 }}
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}, scheme: {{ .scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}, scheme: {{ .scheme }}}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 1
{{- end -}}

{{- define "quire.scheme" -}}
{{ ternary "HTTPS" "HTTP" .Values.tls.enabled }}
{{- end -}}

{{/* Mounts of secrets. Takes root and identity; redis and pageMac, if the service reads them. */}}
{{- define "quire.secretMounts" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls-{{ .identity }}, mountPath: /tls/{{ .identity }}, readOnly: true}
{{- end }}
{{- if .root.Values.monitoring.otlpCaSecret }}
- {name: otlp, mountPath: /secrets/otlp, readOnly: true}
{{- end }}
{{- if and .redis .root.Values.redis.secretName }}
- {name: redis, mountPath: /secrets/redis, readOnly: true}
{{- end }}
{{- if and .pageMac .root.Values.pageMac.secretName }}
- {name: page-mac, mountPath: /secrets/page-mac, readOnly: true}
{{- end }}
{{- end -}}

{{/* The volumes of these mounts. Takes root and identities. */}}
{{- define "quire.secretVolumes" -}}
{{- $root := .root }}
{{- if $root.Values.tls.enabled }}
{{- range .identities }}
- name: tls-{{ . }}
  secret: {secretName: {{ include "quire.name" $root }}-{{ . }}-tls, defaultMode: 0440}
{{- end }}
{{- end }}
{{- with $root.Values.monitoring.otlpCaSecret }}
- name: otlp
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if .redis }}
{{- with $root.Values.redis.secretName }}
- name: redis
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- if .pageMac }}
{{- with $root.Values.pageMac.secretName }}
- name: page-mac
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end -}}

{{/* The folder of models. */}}
{{- define "quire.modelMount" -}}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "quire.modelVolume" -}}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
